"""What this machine is: platform, hardware, disks, and whether they really work."""
