"""Files of pictures: upright, of 8 bits, or refused in one line with the line that names them."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from flowalign.data import Preferences, Prompts, Targets
from flowalign.errors import ConfigError
from rewards.pictures import PictureError, read_picture


def test_a_picture_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    picture = Image.new("RGB", (4, 2), "black")
    picture.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    # turned a quarter clockwise to be looked at
    exif[0x0112] = 6
    picture.save(tmp_path / "x.png", exif=exif)
    read = read_picture(tmp_path / "x.png")
    assert read.size == (2, 4) and read.getpixel((1, 0)) == (255, 255, 255) and read.getpixel((0, 0)) == (0, 0, 0)


def test_16_bits_of_grey_become_8(tmp_path: Path) -> None:
    values = np.array([[0, 257, 25700, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "x.png")
    assert np.asarray(read_picture(tmp_path / "x.png"))[0, :, 0].tolist() == [0, 1, 100, 255]


def broken(folder: Path, kind: str) -> Path:
    file = folder / ("x.tiff" if kind in ("nan", "float") else "x.jpg" if kind == "cut" else "x.png")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    if kind in ("nan", "float"):
        Image.fromarray(np.full((4, 4), np.nan if kind == "nan" else 0.5, dtype=np.float32)).save(file)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind in ("cut", "cut_png"):
        Image.fromarray(noise).save(file)
        file.write_bytes(file.read_bytes()[:-2000])
    elif kind == "crc":
        Image.fromarray(noise).save(file)
        raw = bytearray(file.read_bytes())
        raw[60] ^= 255
        file.write_bytes(raw)
    else:
        file.write_bytes({"empty": b"", "text": b"no picture", "header": b"\x89PNG\r\n\x1a\n"}[kind])
    return file


def test_postscript_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would start Ghostscript on it, whatever the file is called."""
    started: list[list[str]] = []
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    monkeypatch.setattr(subprocess, "check_call", lambda command, **_: started.append(command))
    file = tmp_path / "x.png"
    Image.new("RGB", (8, 8)).save(file, "EPS")
    with Image.open(file) as known:
        assert known.format == "EPS"
    with pytest.raises(PictureError, match="x.png cannot be read as a picture"):
        read_picture(file)
    assert not started


KINDS = ["nan", "float", "pipe", "cut", "cut_png", "crc", "empty", "text", "header"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_picture_is_refused_with_the_line_that_names_it(tmp_path: Path, kind: str) -> None:
    file = broken(tmp_path, kind)
    Image.new("RGB", (8, 8)).save(tmp_path / "whole.png")
    with pytest.raises(PictureError, match=file.name):
        read_picture(file)
    for of, keys in ((Preferences, ("chosen", "rejected")), (Targets, ("target",)), (Prompts, ("image",))):
        lines = [{"prompt": "a"} | dict.fromkeys(keys, name) for name in ("whole.png", file.name)]
        (tmp_path / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ConfigError, match=rf"list.jsonl, line 2: .*{file.name}"):
            of.read(str(tmp_path / "list.jsonl"))
