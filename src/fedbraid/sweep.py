"""Tuning: `sweep`, its settings and its ranges."""

from fedbraid.study.sweep import *
