"""What tests of users and our own stand on: a simulated world around the driver, and the conformance kit."""
