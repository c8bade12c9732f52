"""``kvferry bench faults``: real engines while parts of the fleet break."""
