"""The report: a run directory as one HTML page that opens anywhere, and its step as a trace for Perfetto."""
