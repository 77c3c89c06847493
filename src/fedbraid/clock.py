"""Clocks of clients: durations, bandwidth, devices, availability."""

from fedbraid.schedule.clock import *
