"""Integrations: other libraries' settings, read into onecopy's own."""
