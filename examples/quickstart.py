"""The Python interface in one page: run two methods, compare them, look inside a scenario, classify an image.

python examples/quickstart.py [FOLDER FOR THE RUNS]
"""

import sys
from pathlib import Path

import fcil
from fcil.model import Model
from fcil.plan import plan
from fcil.scenario.scenario import Scenario

root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
short = {"tasks": 3, "rounds": 10}  # any knob of the method, the protocol or the benchmark

# 1. Run. A second call with the same plan returns at once; one that was interrupted goes on.
for method in ("finetune", "joint"):
    result = fcil.run(method, benchmark="digits", seed=0, settings=short, out=root / method)
    print(f"{method}: {result['final']:.1f} % of all classes at the end, {result['forgetting']:.1f} points forgotten")

# 2. Who holds what: the same for every method that runs with this seed.
scenario = Scenario(plan("joint", "digits", settings=short).benchmark, seed=0)
for task, shares in zip(scenario.tasks, scenario.shares(), strict=True):
    names = [scenario.class_names[j] for j in task.new]
    print(f"task {task.index + 1} brings {names}: images per client {shares.sum(axis=1).tolist()}")

# 3. Classify with what a device was sent, and nothing else.
model = Model.of(root / "joint")
images, labels = scenario.test(scenario.tasks[0])
scores = model.client.predict(model.message, images)
print(f"accuracy on the first task's test images: {100 * (scores.argmax(1) == labels).float().mean():.1f} %")
