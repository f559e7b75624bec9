"""Where rows are and what processes them there: host memory or a GPU's."""
