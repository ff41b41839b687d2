"""GPU kernels for language models, each behind one public function. Knows nothing of jaxtune."""
