"""What rounding costs a trained model, in every format here and in llama.cpp's: `make rounding`."""
