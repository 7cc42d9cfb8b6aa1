#!/usr/bin/env python3
"""Prints the path of axe.min.js. The package is there for that file; its own code drives a browser that we do not use."""

import importlib.util
import pathlib

package = importlib.util.find_spec("axe_core_python")
print(pathlib.Path(package.origin).parent / "axe.min.js")
