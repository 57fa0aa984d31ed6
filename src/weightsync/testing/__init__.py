"""What tests of users and our own stand on: a hand-turned clock, and a simulated world around the driver."""
