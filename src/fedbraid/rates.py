"""Learning-rate schedules."""

from fedbraid.core.lr_schedules import *
