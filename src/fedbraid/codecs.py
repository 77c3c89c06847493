"""Codecs: what vectors become on the wire."""

from fedbraid.links.codecs import *
