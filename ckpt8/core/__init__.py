"""What every package needs: errors, element types, text, threads, devices and files. Imports no other package."""
