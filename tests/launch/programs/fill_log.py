"""Print more than the file size that the launcher was started with allows."""

for number in range(2000):
    print(number)
