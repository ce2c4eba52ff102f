"""Temporary: moved to hookline.nested."""

from hookline.nested import map_tensors as map_tensors
from hookline.nested import parts as parts
from hookline.nested import tensors_in as tensors_in
