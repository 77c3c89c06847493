"""The final model for other programs."""

from fedbraid.run.export import *
