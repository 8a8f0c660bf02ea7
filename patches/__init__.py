"""Changes to other packages, one file each: what is wrong, for which versions, and the test that tells when it can
go."""
