"""The version of onecopy, as pyproject.toml has it too."""

__version__ = "0.1.0"
