"""What our web pages share: their files and how they are served."""
