"""`python -m fcil`, for a source folder that is not installed."""

from fcil.cli import main

main()
