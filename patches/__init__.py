"""Changes to other packages, one file each: what is wrong, in which versions, and the test that shows when it can
go."""
