"""Metrics beside the accuracy."""

from fedbraid.data.metrics import *
