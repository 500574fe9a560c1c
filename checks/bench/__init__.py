"""Side-by-side figures: kvwatch and nvitop-exporter on the same fake NVML, in one run."""
