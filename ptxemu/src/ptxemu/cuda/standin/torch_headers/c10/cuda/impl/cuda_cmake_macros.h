// torch's build writes this file; the CPU build lacks it.
#pragma once
