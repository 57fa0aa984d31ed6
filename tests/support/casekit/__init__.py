"""What the tests of cases share: engines that can be told to fail, and what holds after every round."""
