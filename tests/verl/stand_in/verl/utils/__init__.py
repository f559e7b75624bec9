"""See verl's."""
