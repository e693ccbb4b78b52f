"""Energy meters: one file for each kind of sensor."""
