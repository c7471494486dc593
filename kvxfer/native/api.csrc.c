#include "api.h"
#include "ascend/ascend.h"
