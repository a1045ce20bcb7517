"""Nodes in this process: the same folders, simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fcil.deploy.folders import check_folder, inventory
from fcil.deploy.messages import Reply, Request
from fcil.deploy.node import Node
from fcil.errors import UserError
from fcil.plan import Plan, in_order


class LocalWire:
    """A wire to nodes that are here; their addresses count from 0."""

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = nodes

    def online(self) -> dict[int, str]:
        """Return all addresses: nobody goes away, and nobody has a key."""
        return dict.fromkeys(range(len(self.nodes)), "")

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        """Let each answer in turn; what is wrong stops the run."""
        return {address: self.nodes[address].answer(request) for address, request in mail.items()}


def on_nodes(wanted: Plan, folders: Sequence[Path]) -> Plan:
    """Return the plan of a run on these nodes: on others it is another run."""
    quorum, many = wanted.protocol.quorum, len(folders)
    if quorum > many:
        nodes = "1 node" if many == 1 else f"{many} nodes"
        raise UserError(f"quorum={quorum} is not allowed with {nodes}; quorum takes 0 to {many}")
    return replace(wanted, nodes=in_order(folder.resolve() for folder in folders))


def nodes_of(folders: Sequence[Path], state: Path, device: str) -> list[Node]:
    """Return a node for each folder, called by the folder's name."""
    names = [folder.resolve().name for folder in folders]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two of the nodes' folders are called {min(twice)!r}; a node is known by its folder's name")
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; a node's data is a folder of class folders")
        check_folder(folder)
    if not any(inventory(folder) for folder in folders):
        raise UserError("no class folder of these nodes has an image; a node's data is a folder of class folders")
    return [Node(name, folder, state / name, device) for name, folder in zip(names, folders, strict=True)]
