"""The Flower app: everything is in fcil."""

from fcil.deploy.flower import client_app, server_app

server = server_app()
client = client_app()
