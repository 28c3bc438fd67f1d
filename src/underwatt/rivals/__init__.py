"""What Underwatt is compared with: published methods, simple rules, and an oracle where there is one."""
