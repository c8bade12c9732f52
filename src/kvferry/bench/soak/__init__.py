"""``kvferry bench soak``: random traffic on real engines, every answer and every loaded block checked."""
