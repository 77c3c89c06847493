"""Built-in tasks: `load` and their names."""

from fedbraid.data.tasks import *
