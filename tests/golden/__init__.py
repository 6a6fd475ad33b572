"""NumPy float64 models written from the maths alone; nothing here imports the package."""
