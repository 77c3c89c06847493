"""What a round costs, before anything runs."""

from fedbraid.study.cost import *
