"""What each number of the planner's algorithms changes in the cost of plans and in the time of planning."""
