import unittest

import stats


class StatsTest(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(stats.mean([1, 2, 3, 6]), 3)

    def test_mean_of_nothing(self):
        self.assertEqual(stats.mean([]), 0)

    def test_spread(self):
        self.assertEqual(stats.spread([4, 1, 9]), 8)

    def test_report(self):
        self.assertEqual(stats.report("ages", [20, 40]), "ages: mean 30.0, spread 20")


if __name__ == "__main__":
    unittest.main()
