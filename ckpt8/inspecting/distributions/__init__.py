"""How values and codes are distributed: histograms, code usage and errors, for the report in HTML."""
