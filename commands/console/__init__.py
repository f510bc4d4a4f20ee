"""What commands share: options, and how progress, results and errors look on a terminal."""
