"""Where Lennard-Jones placement and repulsion put classes that come task by task, in many and in few dimensions.

`python benchmarks/placement.py` prints a row for each latent size: distances between centroids in units of the rest
distance 2^(1/6) sigma (1 and 1 is a regular simplex), and how far from the first ones' centre the last ones lie.
"""

import torch

from fcil.blocks.centroids import REST, jittered, lennard_jones, repulsion, within_reach

SIGMA = 5.0
SETTINGS = [(10, 2, 9), (10, 2, 6), (10, 2, 3), (100, 10, 307), (100, 10, 99), (100, 10, 64), (100, 10, 20)]


def placed(place, classes: int, at_once: int, latent: int) -> torch.Tensor:
    """Return centroids placed task by task; each task's proposals nearly coincide, somewhere near the old ones."""
    draws, p = torch.Generator().manual_seed(0), torch.zeros(0, latent)
    for _ in range(classes // at_once):
        middle = torch.randn(latent, generator=draws) / latent**0.5
        proposed = middle + 0.01 * torch.randn(at_once, latent, generator=draws)
        start = jittered(within_reach(proposed, p, SIGMA), SIGMA, draws)
        p = torch.cat([p, place(start, p, SIGMA)])
    return p


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| classes, a task | latent | placement | nearest: least | nearest: most | farthest pair | largest norm |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for classes, at_once, latent in SETTINGS:
        for name, place in (("lennard-jones", lennard_jones), ("rfa", repulsion)):
            p = placed(place, classes, at_once, latent)
            apart = torch.cdist(p, p) / (REST * SIGMA)
            near = (apart + torch.diag(torch.full((classes,), torch.inf))).amin(1)
            largest = (p - p[:at_once].mean(0)).norm(dim=1).max() / (REST * SIGMA)
            print(
                f"| {classes}, {at_once} | {latent} | {name} | {near.min():.3f} | {near.max():.3f} "
                f"| {apart.max():.3f} | {largest:.2f} |"
            )
