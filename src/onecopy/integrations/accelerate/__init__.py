"""Accelerate: its FSDP settings in onecopy's terms."""

from onecopy.integrations.accelerate.settings import from_accelerate as from_accelerate
