"""Watching a run: early stopping, the best model, trackers."""

from fedbraid.run.callbacks import *
