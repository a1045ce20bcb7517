"""The baselines' defaults are their papers' numbers; those that were moved are said in the method's own words."""

import importlib
from typing import Any

import pytest

from fcil.methods import METHODS, method

PAPERS: dict[str, dict[str, Any]] = {
    "icarl": {"sgd_momentum": 0.0, "sgd_decay": 1e-5, "mask_absent_new": False, "exemplar_codec": "raw"},
    "bic": {"lr": 0.1, "temperature": 2.0, "validation": 0.1, "hold_beta": 0.1, "exemplar_codec": "raw"},
    "podnet": {
        "lr": 0.1, "spatial": 3.0, "flat": 1.0, "proxies": 10, "margin": 0.6, "nca": "paper", "tune_lr": 0.05,
        "tune_share": 20 / 160, "exemplar_codec": "raw",
    },
    "dde": {
        "lr": 0.1, "neighbours": 10, "distill": 0.25, "temperature": 2.0, "decay": 0.9, "effect": 0.5,
        "exemplar_codec": "raw",
    },
    "geodl": {"lr": 0.1, "distill": 5.0, "form": "cosine", "centre": "images", "grid": 2, "exemplar_codec": "raw"},
    "ssil": {"lr": 0.1, "temperature": 2.0, "ratio": 128 / 32, "exemplar_codec": "raw"},
    "glfc": {
        "lr": 2.0, "compensate": 0.5, "distill": 0.5, "task_detect": "entropy", "entropy_rise": 1.2,
        "perturb_steps": 50, "perturb_lr": 0.2, "inversion_steps": 250, "inversion_lr": 0.1, "iterates": 20,
        "reset_best": False, "exemplar_codec": "raw",
    },
    "fedftg-plain": {
        "lr": 0.1, "sgd_momentum": 0.0, "sgd_decay": 1e-3, "old_teacher": False, "iterations": 10, "student_steps": 5,
        "student_lr": 0.1, "student_decay": 1e-3,
        "student_norm": "batch", "generator_lr": 0.01, "classify": 1.0, "diversify": 1.0, "latent": 256,
        "code_quirk": False,
    },
    "fedspace": {
        "temperature": 0.1, "prototype_weight": 0.01, "contrast_weight": 0.01, "contrast_self": False, "pace": 0.1,
        "mix": 0.5, "sgd_decay": 2e-4,
    },
    "target": {
        "lr": 0.01, "distill": 25.0, "temperature": 2.0, "released_config": False, "latent": 256,
        "generator_steps": 10, "generator_lr": 2e-3, "noise_lr": 0.01, "meta": "fomaml", "statistics": 10.0,
        "statistics_momentum": 0.9, "one_hot": 0.5, "adversarial": 1.0, "warm_up": 20, "student_lr": 0.2,
        "student_temperature": 20.0,
    },
    "mfcl": {
        "lr": 0.1, "decay": 1e-5, "synthetic": 128, "head": 1.0, "distill": 0.1, "latent": 1000,
        "generator_steps": 100, "generator_batch": 128, "generator_lr": 1e-3, "sure": 1.0, "sure_temperature": 1000.0,
        "even": 1.0, "statistics": 50.0, "smooth": 1e-3,
    },
    "remind": {"plastic": 1, "part": 16, "centres": 256, "mixup": 0.1, "crop": 2.0, "single_pass": False},
    "remind-plus": {
        "plastic": 2, "reconstruct": 1.0, "auxiliary": 1.0, "classify": 1.0, "part": 4, "centres": 256, "mixup": 0.1,
    },
    "ictrl": {
        "closed_loop": 8.0, "keep": 1.0, "eps": 1.0, "components": 15, "classifier": "nearest_subspace",
        "code_quirk": False,
    },
}  # fmt: skip

MOVED = [  # method, knob, our number, and what its docstring says of it
    ("fedftg", "own_classes", True, "compares the classes of its own task only"),
    ("fedftg", "student_norm", "clients", "batch norm goes by the clients'\nstatistics"),
    ("fedftg", "old_teacher", True, "Here the model of the last task is one more teacher"),
    ("fedspace", "lr", 0.01, "SGD, not Adam"),
    ("fedspace", "mask", "held", "`mask=reached`"),
    ("target", "student_steps", 0, "100 in place of 400 (`student_steps`)"),
    ("target", "batches", 32, "32 are made"),
    ("ictrl", "ascent", 0.03, "a small weight, `ascent`"),
    ("ictrl", "lr", 0.4, "by SGD, not in turn by Adam"),
    ("bic", "correction_rounds", 10, "Newton's steps in place of hundreds of plain ones"),
    ("bic", "hold_alpha", 0.01, "alpha is held near 1"),
    ("glfc", "prototypes", 50, "At most `prototypes` are rebuilt at a\ntime"),
]


@pytest.mark.parametrize("name", PAPERS)
def test_a_default_is_the_papers_number(name: str) -> None:
    config = method(name).config()
    assert {knob: getattr(config, knob) for knob in PAPERS[name]} == PAPERS[name]


@pytest.mark.parametrize(("name", "knob", "value", "said"), MOVED)
def test_a_number_that_was_moved_is_said(name: str, knob: str, value: object, said: str) -> None:
    assert getattr(method(name).config(), knob) == value
    assert said in (importlib.import_module(METHODS[name].module).__doc__ or "")


def test_every_baseline_is_here() -> None:
    families = ("exemplars", "data-free", "hybrid")
    baselines = {entry.module for name, entry in METHODS.items() if entry.family in families and "hr" not in name}
    assert {METHODS[name].module for name in PAPERS} == baselines
