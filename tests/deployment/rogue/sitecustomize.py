"""Put on PYTHONPATH, this makes a node do what the file that ROGUE names says.

nan, shapes, counts or replay: it answers nonsense. "hold train 1": from task 1 on (they count from 0) it does not
answer train until the file is gone, and says in FILE.held that it has been asked. It is loaded by every Python process;
only the one that answers for the node is changed.
"""

import os
import sys

if any("flwr-clientapp" in word for word in sys.orig_argv) and os.environ.get("ROGUE"):
    import time
    from pathlib import Path

    import torch

    from fcil.deploy.messages import Reply, Request
    from fcil.deploy.node import Node

    honest = Node.answer

    def _is_held(how: str, asked: Request) -> bool:
        what, _, task = how.removeprefix("hold ").partition(" ")
        return how.startswith("hold ") and asked.facts["handler"] == what and asked.facts["call"]["task"] >= int(task)

    def answer(node: Node, asked: Request) -> Reply:
        told = Path(os.environ["ROGUE"])
        how = told.read_text().strip() if told.exists() else ""
        if asked.kind != "ask" or not how:
            return honest(node, asked)
        if _is_held(how, asked):
            Path(f"{told}.held").touch()
            while told.exists():
                time.sleep(0.2)
        reply = honest(node, asked)
        tensors = dict(reply.tensors)
        floating = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()]
        if how == "nan" and floating:
            tensors[floating[0]] = torch.full_like(tensors[floating[0]], float("nan"))
        if how == "shapes" and floating:
            tensors[floating[0]] = torch.zeros(7, 7)
        if how == "counts" and "count" in tensors:
            tensors["count"] = torch.tensor(-5)
        if how == "replay":
            return Reply({**reply.facts, "step": reply.facts["step"] - 1}, tensors)
        return Reply(reply.facts, tensors)

    Node.answer = answer  # type: ignore[method-assign]
