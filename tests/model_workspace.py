"""A folder as real projects have them, for the cases of tests/data/model_cases."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.harness import shell
from tests.workspace import tree

APP = '''\
"""Bills of a small shop."""

import json


class Bill:
    """What was bought, and its prices."""

    def __init__(self, items):
        self.items = items

    def total(self):
        """Sum of all prices."""
        return sum(price for _, price in self.items)

    def discount(self, rate):
        """The total with a part taken off."""
        if not 0 <= rate <= 1:
            raise ValueError("rate")
        return self.total() * (1 - rate)


def read_bill(path):
    with open(path) as file:
        return Bill(json.load(file))


def show(bill):
    print("total:", bill.total())
    print("items:", len(bill.items))


def main():
    show(read_bill("bill.json"))


main()
'''
TABS = "def size(items):\n\tcount = 0\n\tfor item in items:\n\t\tcount += item\n\treturn count\n"
TYPESCRIPT = """\
export interface Bill {
  items: string[];
}

export function count(bill: Bill): number {
  return bill.items.length;
}
"""
NOTEBOOK = """\
{
 "cells": [
  {"cell_type": "code", "outputs": [{"text": "%s"}], "source": ["count = 1"]}
 ],
 "nbformat": 4
}
"""
BINARY = bytes(range(256)) * 40
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 65
PDF = b"%PDF-1.4\n1 0 obj << /Type /Catalog >> endobj\n" + b"\xe2\0" * 40

COMMIT = "git -c user.name=me -c user.email=me@here commit -q"


def make_workspace(folder: Path) -> Path:
    """A repository with sources, and with files that are no text, too long, ignored or secret."""
    shutil.copytree(_template(), folder, dirs_exist_ok=True)
    return folder


@cache
def _template() -> Path:
    """Made once for each process, since git takes longer than a copy; without sample hooks and with
    packed objects, since hundreds of tests copy each file."""
    folder = Path(tempfile.mkdtemp(prefix="template-"))
    tree(
        folder,
        {
            "notes.txt": "a note\n",
            "src/app.py": APP,
            "src/tabs.py": TABS,
            "web/app.ts": TYPESCRIPT,
            "big.py": "".join(f"value_{number} = {number}\n" for number in range(1, 6001)),
            "web/app.min.js": "var a=1;" * 2000 + "\n",
            "data/bin.dat": BINARY,
            "data/img.png": PNG,
            "data/doc.pdf": PDF,
            "data/book.ipynb": NOTEBOOK % ("1" * 5000),
            "data/latin1.txt": "café au lait\n".encode("latin-1"),
            "dist/out.js": "built\n",
            ".gitignore": "dist/\n",
            ".env": "TOKEN=hidden\n",
        },
    )
    shell(folder, f"git init -q --template= -b main && git add src && {COMMIT} -m first")
    shell(folder, f"git add web && {COMMIT} -m second && git add . && {COMMIT} -m third")
    shell(folder, "git repack -adq && git prune-packed -q")
    return folder
