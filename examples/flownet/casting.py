"""Random scenes: which photographs, which outlines, which motions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from examples.flownet.scene import Layer, Matrix, Outline, Scene

USUAL_AREA = 192 * 256  # that the number of objects below is meant for


def random_scene(
    photos: Sequence[Tensor], height: int, width: int, rng: np.random.Generator, speed: float = 1.0
) -> Scene:
    """Shifts have heavy tails: most are small, some very large, as in FlyingChairs. speed: of all motions."""
    middle = np.array([width - 1, height - 1]) / 2
    shift = speed * np.clip(_heavy(rng, 1.3), -40, 40)
    turn = _turned(_now_and_then(rng, 0.3, 0.06 * speed), 1 + _now_and_then(rng, 0.6, 0.03 * speed))
    motion = _about(turn, middle, middle + shift)
    layers = [_background(photos, height, width, motion, rng)]
    count = round(rng.uniform(5, 12) * height * width / USUAL_AREA)
    layers += [_object(photos, height, width, motion, rng, speed) for _ in range(count)]
    return Scene(layers, height, width)


def _background(photos: Sequence[Tensor], height: int, width: int, motion: Matrix, rng: np.random.Generator) -> Layer:
    photo = photos[rng.integers(len(photos))]
    size = np.array(photo.shape[:0:-1])  # width, height
    linear = _turned(rng.normal(0, 0.1), rng.uniform(0.6, 1.2)) @ np.diag([rng.choice([-1, 1]), 1])
    room = np.maximum(0, size - np.abs(linear) @ [width, height]) / 2
    target = (size - 1) / 2 + rng.uniform(-room, room)
    return Layer(photo, _about(linear, np.array([width - 1, height - 1]) / 2, target), motion)


def _object(
    photos: Sequence[Tensor], height: int, width: int, background: Matrix, rng: np.random.Generator, speed: float
) -> Layer:
    photo = photos[rng.integers(len(photos))]
    size = np.array(photo.shape[:0:-1])
    middle = rng.uniform([-0.1 * width, -0.1 * height], [1.1 * width, 1.1 * height])
    shift = speed * np.clip(_heavy(rng, 1.6), -80, 80)
    turn = _turned(_now_and_then(rng, 0.7, 0.15 * speed), 1 + _now_and_then(rng, 0.7, 0.07 * speed))
    own = _about(turn, middle, middle + shift)
    texture = _turned(rng.uniform(0, 2 * math.pi), rng.uniform(0.6, 1.2)) @ np.diag([rng.choice([-1, 1]), 1])
    stretch = math.exp(rng.uniform(-0.5, 0.5))
    form = np.diag([stretch, 1 / stretch]) @ _turned(rng.uniform(0, 2 * math.pi), 1)
    return Layer(
        photo,
        _about(texture, middle, rng.uniform(0.2, 0.8, 2) * size),
        background @ own,
        _outline(rng),
        _about(form, middle, np.zeros(2)),
    )


def _outline(rng: np.random.Generator) -> Outline:
    order = np.arange(1, 7)
    waves = rng.normal(0, 0.3, 6) / order * np.exp(2j * math.pi * rng.uniform(size=6))
    hole = rng.uniform(0.3, 0.7) if rng.uniform() < 0.3 else 0.0
    return Outline(math.exp(rng.uniform(math.log(14), math.log(90))), waves, hole)


def _heavy(rng: np.random.Generator, spread: float) -> np.ndarray:
    drawn = rng.normal(0, spread, 2)
    return np.sign(drawn) * np.abs(drawn) ** 3


def _now_and_then(rng: np.random.Generator, chance: float, spread: float) -> float:
    """0, or with this chance a number of this size, at most three times it."""
    drawn = np.clip(rng.normal(0, spread), -3 * spread, 3 * spread)
    return float(drawn) if rng.uniform() < chance else 0.0


def _turned(angle: float, zoom: float) -> np.ndarray:
    sine, cosine = zoom * math.sin(angle), zoom * math.cos(angle)
    return np.array([[cosine, -sine], [sine, cosine]])


def _about(linear: np.ndarray, origin: np.ndarray, target: np.ndarray) -> Matrix:
    """The affine map with this linear part that brings `origin` to `target`."""
    matrix = np.eye(3)
    matrix[:2, :2] = linear
    matrix[:2, 2] = target - linear @ origin
    return matrix
