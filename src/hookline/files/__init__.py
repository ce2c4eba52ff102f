"""Files that anybody may have written: opened safely, named plainly, shown without surprises."""
