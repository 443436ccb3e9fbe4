"""Sounds as files, and as pictures where only a picture can be shown."""

import dataclasses
import wave
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from rewards import Sound

WIDTH, HEIGHT = 192, 96
"""Pixels of a sound's drawing."""
INK = "#1b1d21"
SMALL_RATE = 8000
"""Samples a second of a small copy."""
SMALL_SECONDS = 5


def save_sound(sound: "Sound", path: Path) -> Path:
    """Write a sound as a WAV file of 16 bits; returns the path with its ending."""
    path = path.with_suffix(".wav")
    channels = np.atleast_2d(sound.waveform)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(sound.rate)
        file.writeframes((channels.T.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return path


def small(sound: "Sound") -> "Sound":
    """One channel of a sound's first seconds at a telephone's rate: 80 kB as a file."""
    return dataclasses.replace(sound, waveform=sound.at(SMALL_RATE)[: SMALL_SECONDS * SMALL_RATE], rate=SMALL_RATE)


def drawn(sound: "Sound") -> Image.Image:
    """A sound's loudness over time: of each stretch the largest amplitude, up and down from the middle."""
    loudest = np.abs(np.atleast_2d(sound.waveform)).max(axis=0)
    heights = [float(part.max(initial=0)) for part in np.array_split(loudest, WIDTH)]
    picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(picture)
    for x, height in enumerate(heights):
        reach = min(height, 1.0) * (HEIGHT / 2 - 1)
        pen.line([(x, HEIGHT / 2 - reach), (x, HEIGHT / 2 + reach)], fill=INK)
    return picture
