"""How data is split across clients."""

from fedbraid.data.partition import *
