"""Low-rank adapters that average well."""

from fedbraid.models.lora import *
