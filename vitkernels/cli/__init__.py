"""The console: train, doctor and tune. Only this package words settings and command lines."""
