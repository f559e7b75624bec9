"""Where rows are, and who touches them there: memory of the host, or a GPU's."""
