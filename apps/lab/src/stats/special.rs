//! Functions that tables of statistics are made of.
//!
//! Source: *NIST Digital Library of Mathematical Functions*, 5.11 (gamma and its derivatives, with the
//! recurrences of 5.5) and 8.17 (incomplete beta function).

/// The logarithm of the gamma function, for arguments above 0.
fn ln_gamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 10.0 {
        shift -= x.ln();
        x += 1.0;
    }
    let over = 1.0 / (x * x);
    let series = (1.0 / 12.0 - over * (1.0 / 360.0 - over * (1.0 / 1260.0 - over / 1680.0))) / x;
    shift + (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series
}

/// The derivative of [`ln_gamma`].
pub(super) fn digamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 10.0 {
        shift -= 1.0 / x;
        x += 1.0;
    }
    let over = 1.0 / (x * x);
    shift + x.ln() - 0.5 / x - over * (1.0 / 12.0 - over * (1.0 / 120.0 - over / 252.0))
}

/// The second derivative of [`ln_gamma`].
pub(super) fn trigamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 10.0 {
        shift += 1.0 / (x * x);
        x += 1.0;
    }
    let over = 1.0 / (x * x);
    shift + 1.0 / x + over / 2.0 + over / x * (1.0 / 6.0 - over * (1.0 / 30.0 - over / 42.0))
}

/// The argument at which [`trigamma`] has this value, which must be above 0. The function falls
/// from infinity to 0.
pub(super) fn trigamma_inverse(value: f64) -> f64 {
    bisected(1e-6, 1e9, |x| trigamma(x) > value)
}

/// The largest argument for which `holds` returns true, found by bisection of the ratio.
fn bisected(mut low: f64, mut high: f64, holds: impl Fn(f64) -> bool) -> f64 {
    // In logarithms, 40 halvings of a range of 50 suffice.
    for _ in 0..40 {
        let middle = (low * high).sqrt();
        if holds(middle) { low = middle } else { high = middle }
    }
    (low * high).sqrt()
}

/// The regularized incomplete beta function, computed as a continued fraction.
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    let front = ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (-x).ln_1p();
    let away = |number: f64| if number.abs() < 1e-300 { 1e-300 } else { number };
    let (mut fraction, mut c, mut d) = (1.0, 1.0, 1.0 / away(1.0 - (a + b) * x / (a + 1.0)));
    fraction *= d;
    for m in 1..10_000 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut step = 1.0;
        for term in [even, odd] {
            d = 1.0 / away(1.0 + term * d);
            c = away(1.0 + term / c);
            step *= c * d;
        }
        fraction *= step;
        if (step - 1.0).abs() < 1e-12 {
            break;
        }
    }
    front.exp() * fraction / a
}

/// The quantile of Student's distribution: with this two-sided probability, a value is farther from
/// the middle.
pub(super) fn student(chance: f64, freedom: f64) -> f64 {
    if !(freedom > 0.0 && chance > 0.0) {
        return f64::INFINITY;
    }
    // Beyond this the distribution is practically normal.
    let freedom = freedom.min(1e6);
    let beyond = |t: f64| incomplete_beta(freedom / 2.0, 0.5, freedom / (freedom + t * t));
    bisected(1e-9, 1e12, |t| beyond(t) > chance)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "{a} {b}");
    }

    /// Tables of Student's distribution, two-sided.
    #[test]
    fn students_table() {
        for (chance, freedom, t) in [
            (0.05, 1.0, 12.7062),
            (0.05, 4.0, 2.776_45),
            (0.01, 4.0, 4.604_09),
            (0.001, 10.0, 4.586_89),
            (0.05, 30.0, 2.042_27),
            (0.05, f64::INFINITY, 1.959_96),
            (0.001, 120.0, 3.373_5),
        ] {
            near(student(chance, freedom), t);
        }
        assert_eq!(student(0.05, 0.0), f64::INFINITY);
        assert!(student(1e-9, 0.5).is_finite());
    }

    #[test]
    fn gamma_and_its_kin() {
        near(ln_gamma(0.5), std::f64::consts::PI.sqrt().ln());
        near(ln_gamma(11.0), 3_628_800f64.ln());
        near(digamma(1.0), -0.577_215_66);
        near(trigamma(1.0), std::f64::consts::PI.powi(2) / 6.0);
        near(trigamma(0.5), std::f64::consts::PI.powi(2) / 2.0);
        for x in [0.01, 0.7, 3.0, 500.0] {
            near(trigamma_inverse(trigamma(x)), x);
        }
    }
}
